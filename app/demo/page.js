// Owns what a server cannot do: the choice of light or dark, honest names for bare controls, and
// files dropped beside the fields.
(() => {
  const KEY = "dit-graphs-theme";
  const apply = (name) => document.body.classList.toggle("dark", name === "dark");
  const stored = () => {
    try { return localStorage.getItem(KEY); } catch { return null; }
  };
  document.addEventListener("click", (event) => {
    if (!event.target.closest || !event.target.closest("#dg-theme")) return;
    const name = document.body.classList.contains("dark") ? "light" : "dark";
    apply(name);
    try { localStorage.setItem(KEY, name); } catch { /* private windows keep nothing */ }
  });
  // Some of Gradio's buttons are called something else than they say; what they say is better.
  const MISNAMED = ".upload-container[aria-label], .thumbnail-lg[aria-label]";
  const rename = () => {
    for (const button of document.querySelectorAll(MISNAMED)) button.removeAttribute("aria-label");
    // A message's head is a button with the close button inside: two in one place are none.
    for (const head of document.querySelectorAll(".toast-header[role]")) {
      head.removeAttribute("role");
      head.removeAttribute("tabindex");
      head.removeAttribute("aria-label");
    }
  };
  // A file dropped beside a field would replace the page, and the run with it. It goes where the
  // settings of a file made here are restored; over a picture that is there already it does nothing.
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const isBeside = (event) => hasFiles(event) && !event.target.closest?.(".upload-container");
  document.addEventListener("dragover", (event) => { if (isBeside(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!isBeside(event)) return;
    event.preventDefault();
    const field = document.querySelector("#dg-restore input[type=file]");
    if (!field || event.target.closest?.("#dg-inputs")) return;
    field.files = event.dataTransfer.files;
    field.dispatchEvent(new Event("change", {bubbles: true}));
  });
  const start = () => {
    if (stored()) apply(stored());
    rename();
    new MutationObserver(rename).observe(document.body, {
      childList: true, subtree: true, attributes: true, attributeFilter: ["aria-label"],
    });
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
