"""The vLLM servers behind the explorer: choice of the engine for a chat, HTTP to it, and its administration."""
