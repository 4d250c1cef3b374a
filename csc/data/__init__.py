"""From annotations to batches."""

__all__ = ["FORMATS", "SUFFIXES"]

# All images that are ever decoded, for training or prediction: Pillow knows formats that start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")  # of their files
