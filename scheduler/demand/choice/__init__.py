"""The choice of a demand cache's eviction policy, by replaying recorded uses."""
