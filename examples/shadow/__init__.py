"""Shadow traffic: a support desk whose trainee learns from copies of production's calls, and never writes."""
