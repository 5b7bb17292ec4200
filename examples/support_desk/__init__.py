"""A support desk that learns from its customers' ratings to which of 36 desks a ticket belongs."""
