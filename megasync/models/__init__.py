"""Where models come from: names on a hub, as folders in its cache (`hub`)."""
