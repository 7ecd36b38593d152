"""Episodes: what the policy said and was told, turn by turn, and how that becomes rows of a batch."""
