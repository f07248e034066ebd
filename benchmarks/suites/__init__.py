"""One file per suite: which cases a user's question turns into."""
