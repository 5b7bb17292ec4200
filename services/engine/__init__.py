"""`flywheel engine`: vLLM's OpenAI server with the flags that training needs, warmed up before it gets traffic."""
