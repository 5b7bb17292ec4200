"""Choose the version that answers a request."""
