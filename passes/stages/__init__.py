"""Pipeline stages: what they cost before they are sharded, and how layers merge into them."""
