"""Where models come from: folders, the hub, GGUF files, the built-in one, or nothing."""
