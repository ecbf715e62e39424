"""etcd as the store that several clusterds share."""
