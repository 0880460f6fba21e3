"""Write an HTML page about a recording: its data, the doctor's findings and its episodes."""
