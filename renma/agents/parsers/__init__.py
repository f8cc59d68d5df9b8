"""What a policy wrote to an Action: plain call lines, and JSON between tags."""
