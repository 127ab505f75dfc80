// Loads the page again if one of its scripts could not be loaded, as when the browser's network changes meanwhile. Without
// one of its modules the page would say "Loading …" forever. Each failure doubles the wait, up to a minute.
let failed = false;
addEventListener(
  "error",
  ({ target }) => {
    if (failed || !target.src?.startsWith(`${location.origin}/ui/`)) return;
    failed = true;
    const reloads = Number(sessionStorage.getItem("reloads"));
    sessionStorage.setItem("reloads", reloads + 1);
    setTimeout(() => location.reload(), Math.min(2_000 * 2 ** reloads, 60_000));
  },
  true,
);
addEventListener("load", () => failed || sessionStorage.removeItem("reloads"));
