"""The vLLM servers behind the explorer: their administration, and the pool that chats draw from."""
