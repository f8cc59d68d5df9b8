"""Messages to token ids: plain few-shot transcripts, and chat templates."""
