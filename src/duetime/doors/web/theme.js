// The theme: follows the system until the user picks one. Runs before the first paint.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remember = (theme) => {
    try {
      localStorage.setItem("duetime-theme", theme);
    } catch {
      // Without storage the choice lasts until the page is closed.
    }
  };
  const show = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = theme === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colors`);
    }
    document.dispatchEvent(new Event("themechange"));
  };
  let chosen = null;
  try {
    chosen = localStorage.getItem("duetime-theme");
  } catch {
    // As above.
  }
  const current = () => chosen ?? (dark.matches ? "dark" : "light");
  show(current());
  dark.addEventListener("change", () => show(current()));
  addEventListener("DOMContentLoaded", () => {
    show(current());
    document.getElementById("theme").addEventListener("click", () => {
      chosen = current() === "dark" ? "light" : "dark";
      remember(chosen);
      show(chosen);
    });
  });
})();
