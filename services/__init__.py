"""Entry points: composition roots of the processes. No other package imports them."""
