"""Results of a batch's lines: looked for, kept, handed over, and written into its two files."""
