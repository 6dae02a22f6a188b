"""What `combine-micro-batches` does with the relations of a step: it refuses, or splits."""
