"""Where prompts come from: files, tables and tasks, alone or as a weighted mixture."""
