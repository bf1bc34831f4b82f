"""Everything that proposes tokens: draft families, the artifact on disk, the key-value cache they decode with."""
