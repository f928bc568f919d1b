"""The one loop: schedule, target forward, verify, commit, output, draft."""
