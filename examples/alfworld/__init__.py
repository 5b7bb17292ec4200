"""ALFWorld: household tasks in words."""
