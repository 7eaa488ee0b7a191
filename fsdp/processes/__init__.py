"""The processes of a run: how they meet, agree, watch each other and stop."""
