"""Networks: a timm backbone, a head that grows with the classes, and the two together."""
