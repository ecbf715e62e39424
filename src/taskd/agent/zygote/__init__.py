"""Fork server of a node: a process that has imported torch once and forks workers from then on."""
