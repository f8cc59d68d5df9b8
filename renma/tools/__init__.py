"""What an agent can call. A tool is a method marked `@tool` (tools/base.py) on an environment."""
