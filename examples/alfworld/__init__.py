"""ALFWorld: household tasks described in text."""
