"""Models of a worker before an engine has them: names, checks, downloads, conversions and templates."""
