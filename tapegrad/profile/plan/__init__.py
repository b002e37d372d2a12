"""Plans: which calls to checkpoint so that a program fits, what that costs, and putting it to work."""
