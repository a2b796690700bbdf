// Light or dark: the reader's system decides until the button is used.
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Switch to light colours" : "Switch to dark colours");
  };
  try {
    const kept = localStorage.getItem("dpivon-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a browser may keep nothing for files */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("dpivon-theme", root.dataset.theme); } catch { /* see above */ }
    tell();
  });
  system.addEventListener("change", tell);
  button.hidden = false;
  tell();
})();

// A link to a folded section opens it; paper gets all of them.
(() => {
  const open = () => document.getElementById(location.hash.slice(1))?.querySelector(".fold")?.setAttribute("open", "");
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", () => document.querySelectorAll(".fold").forEach((fold) => fold.setAttribute("open", "")));
})();
