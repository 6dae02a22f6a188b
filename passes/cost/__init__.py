"""What a cluster can do: devices, links, collectives and changes of layout, in seconds."""
