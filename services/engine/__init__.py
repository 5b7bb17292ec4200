"""`flywheel engine`: vLLM's own OpenAI server with the flags that learning needs, warmed up before it takes traffic."""
