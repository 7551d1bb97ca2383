"""The command line and what only it needs. Nothing else imports it."""
