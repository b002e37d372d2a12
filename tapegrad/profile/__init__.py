"""The command line: ``tapegrad demo`` and what looks at memory from outside."""
