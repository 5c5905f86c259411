"""What a run says about itself: declared metrics, their file, curves, alarms, the terminal."""
