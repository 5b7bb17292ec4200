"""A web shop: search, compare, choose options, and buy the product that the instruction asks for."""
