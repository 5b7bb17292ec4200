"""Code that all routes share: keys, limits, request bodies, error responses, and the connection to the caller."""
