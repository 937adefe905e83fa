//! Trials: which of several settings makes tokens faster. Pure: the times of tokens are data, so equal times make equal
//! decisions.

/// Whether seconds were measured. Callers give NaN or a negative number where they were not.
pub(crate) fn is_measured(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= 0.0
}

/// A trial's windows. Lengths are in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Windows {
    /// Setting of each window, there and back: steady changes, such as a cache that fills, affect all settings alike.
    pub(crate) settings: &'static [usize],
    pub(crate) measured: u32,
    /// Tokens at the start of each window that are not measured: the window before has filled the cache.
    pub(crate) settle: u32,
}

impl Windows {
    /// Tokens of a window.
    pub(crate) const fn tokens(&self) -> u32 {
        self.settle + self.measured
    }
}

/// A running trial of up to three settings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trial {
    windows: Windows,
    /// Tokens since it began.
    token: u32,
    /// Next tokens that are not measured.
    unsettled: u32,
    /// Times of tokens by setting.
    pub(crate) took: [Mean; 3],
}

impl Trial {
    pub(crate) fn new(windows: Windows) -> Self {
        Self { windows, token: 0, unsettled: windows.settle, took: Default::default() }
    }

    /// The setting of the running token.
    pub(crate) fn setting(&self) -> usize {
        let window = self.token / self.windows.tokens();
        self.windows.settings[window as usize % self.windows.settings.len()]
    }

    /// Something else ran: the next tokens are not measured.
    pub(crate) fn interrupt(&mut self) {
        self.unsettled = self.windows.settle;
    }

    /// A token is over; `None` if its time was not measured. Returns whether its window is over, too.
    pub(crate) fn end_token(&mut self, seconds: Option<f64>) -> bool {
        let setting = self.setting();
        if let (0, Some(seconds)) = (self.unsettled, seconds) {
            self.took[setting].add(seconds);
        }
        self.unsettled = self.unsettled.saturating_sub(1);
        self.token += 1;
        let is_window_over = self.token.is_multiple_of(self.windows.tokens());
        if is_window_over {
            self.interrupt();
        }
        is_window_over
    }

    /// Whether all windows are over.
    pub(crate) fn is_over(&self) -> bool {
        self.token >= self.windows.tokens() * self.windows.settings.len() as u32
    }
}

/// The mean of measured seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Mean {
    pub(crate) n: u32,
    pub(crate) seconds: f64,
    /// Sum of squared deviations from the mean.
    squares: f64,
}

impl Mean {
    pub(crate) fn add(&mut self, seconds: f64) {
        self.n += 1;
        let deviation = seconds - self.seconds;
        self.seconds += deviation / f64::from(self.n);
        self.squares += deviation * (seconds - self.seconds);
    }

    /// Variance of the mean: its standard error squared.
    pub(crate) fn variance(&self) -> f64 {
        let n = f64::from(self.n);
        if self.n > 1 { self.squares / (n - 1.0) / n } else { 0.0 }
    }
}

/// A weighted mean in which old values fade.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct FadingMean {
    pub(crate) mean: f64,
    /// 0: there is none yet.
    pub(crate) weight: f64,
}

impl FadingMean {
    /// Earlier values keep this part of their weight.
    pub(crate) fn fade(&mut self, part: f64) {
        self.weight *= part;
    }

    pub(crate) fn take(&mut self, value: f64, weight: f64) {
        self.weight += weight;
        self.mean += weight / self.weight * (value - self.mean);
    }
}
