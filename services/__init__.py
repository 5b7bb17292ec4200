"""What can be started: composition roots. Nothing imports them."""
