"""The tokenizer API: text to tokens and back, for clients that count or inspect tokens."""
