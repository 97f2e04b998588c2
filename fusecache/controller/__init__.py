"""The controller: hears what nodes hold, and places gated pods where their data is."""
