// The appearance that was chosen, before anything is drawn.
(() => {
  try {
    const theme = localStorage.getItem("hobbit.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Nothing may be stored here: as the system.
  }
})();
