"""What a reader and a class meet: notebooks executed, copied for students, graded."""
