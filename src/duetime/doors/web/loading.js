// Loads the page again if one of its scripts could not be loaded, as when the browser's network changes meanwhile. Without
// one of its modules the page would say "Loading …" forever.
addEventListener(
  "error",
  ({ target }) => {
    if (target.src?.startsWith(`${location.origin}/ui/`)) setTimeout(() => location.reload(), 2_000);
  },
  true,
);
