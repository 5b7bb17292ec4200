"""How fast, how well and how robustly each algorithm learns from each form of feedback."""
