"""A support desk that learns which of 36 desks a ticket belongs to, from what its customers say."""
