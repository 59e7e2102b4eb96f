"""Finding peers, and facts about peers."""
