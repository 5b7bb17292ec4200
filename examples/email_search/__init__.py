"""Email search: find the mail that answers a question, read it, answer, and cite the source."""
