"""What a plan says, held against conditions and against what it was locked to."""
