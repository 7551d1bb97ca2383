"""Grade submitted notebooks: read, judge in processes of their own, write tables and pages."""
