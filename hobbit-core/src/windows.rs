//! Calls of the Windows API, as safe functions.

use std::cell::OnceCell;
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::{size_of, zeroed};
use std::net::TcpListener;
use std::os::windows::fs::OpenOptionsExt;
use std::os::windows::io::{AsRawHandle, AsRawSocket, FromRawHandle, FromRawSocket, OwnedHandle};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;
use std::time::Duration;

use windows_sys::Win32::Foundation::{
    CloseHandle, ERROR_HANDLE_EOF, ERROR_IO_PENDING, FILETIME, GENERIC_READ, HANDLE, INVALID_HANDLE_VALUE,
};
use windows_sys::Win32::Globalization::CP_UTF8;
use windows_sys::Win32::Networking::WinSock::{
    FROM_PROTOCOL_INFO, INVALID_SOCKET, WSA_FLAG_OVERLAPPED, WSADuplicateSocketW, WSAPROTOCOL_INFOW, WSASocketW,
};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, FILE_BASIC_INFO, FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_NO_BUFFERING,
    FILE_FLAG_OPEN_REPARSE_POINT, FILE_FLAG_OVERLAPPED, FILE_FLAG_RANDOM_ACCESS, FILE_READ_ATTRIBUTES,
    FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_SHARE_WRITE, FILE_TYPE_DISK, FILE_TYPE_PIPE, FileBasicInfo,
    GetFileInformationByHandle, GetFileInformationByHandleEx, GetFileType, ReOpenFile, ReadFile, WriteFile,
};
use windows_sys::Win32::System::Console::{
    CTRL_BREAK_EVENT, CTRL_C_EVENT, ENABLE_PROCESSED_OUTPUT, ENABLE_VIRTUAL_TERMINAL_PROCESSING, GetConsoleMode,
    GetStdHandle, STD_ERROR_HANDLE, STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, SetConsoleCP, SetConsoleCtrlHandler,
    SetConsoleMode, SetConsoleOutputCP,
};
use windows_sys::Win32::System::Diagnostics::Debug::{SEM_NOGPFAULTERRORBOX, SetErrorMode};
use windows_sys::Win32::System::IO::{GetOverlappedResult, OVERLAPPED};
use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
    JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation,
    QueryInformationJobObject, SetInformationJobObject,
};
use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, MEM_RESET, PAGE_NOACCESS, PAGE_READWRITE, VirtualAlloc, VirtualFree,
    VirtualUnlock,
};
use windows_sys::Win32::System::ProcessStatus::{
    K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS, PROCESS_MEMORY_COUNTERS_EX,
};
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
use windows_sys::Win32::System::Threading::{
    CreateEventW, GetCurrentProcess, GetCurrentThreadId, GetProcessHandleCount, GetProcessIoCounters, GetProcessTimes,
    IO_COUNTERS, OpenProcess, PROCESS_TERMINATE, TerminateProcess,
};

// Files.

/// A path that the C library opens, however long it is: near the limit of 260 characters the verbatim one, `\\?\C:\…`.
/// The standard library does this by itself.
pub fn openable(path: &Path) -> PathBuf {
    let is_long = std::path::absolute(path).is_ok_and(|path| path.as_os_str().len() > 240);
    let verbatim = if is_long { std::fs::canonicalize(path).ok() } else { None };
    verbatim.unwrap_or_else(|| path.to_owned())
}

/// Facts about an open file.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    pub len: u64,
    /// Times in nanoseconds, from one fixed point.
    pub modified_ns: i128,
    pub changed_ns: i128,
    /// Volume and number of the file there.
    pub identity: (u64, u64),
    /// Names of the file.
    pub links: u32,
}

/// Facts about an open file.
pub fn file_facts(file: &File) -> io::Result<FileFacts> {
    let handle = file.as_raw_handle();
    // SAFETY: plain numbers, for which zero is a value.
    let (mut facts, mut basic): (BY_HANDLE_FILE_INFORMATION, FILE_BASIC_INFO) = unsafe { zeroed() };
    // SAFETY: the handle is open, and both structs have the sizes that the calls write.
    unsafe {
        checked(GetFileInformationByHandle(handle, &mut facts))?;
        let (pointer, bytes) = ((&raw mut basic).cast::<c_void>(), size_of::<FILE_BASIC_INFO>() as u32);
        checked(GetFileInformationByHandleEx(handle, FileBasicInfo, pointer, bytes))?;
    }
    let joined = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    Ok(FileFacts {
        len: joined(facts.nFileSizeHigh, facts.nFileSizeLow),
        modified_ns: i128::from(basic.LastWriteTime) * 100,
        changed_ns: i128::from(basic.ChangeTime) * 100,
        identity: (facts.dwVolumeSerialNumber.into(), joined(facts.nFileIndexHigh, facts.nFileIndexLow)),
        links: facts.nNumberOfLinks,
    })
}

/// Opens a file or directory to ask for its facts: the one behind a link, or the link itself.
pub fn open_for_facts(path: &Path, is_link_followed: bool) -> io::Result<File> {
    let link = if is_link_followed { 0 } else { FILE_FLAG_OPEN_REPARSE_POINT };
    let mut options = OpenOptions::new();
    options.access_mode(FILE_READ_ATTRIBUTES).custom_flags(FILE_FLAG_BACKUP_SEMANTICS | link).open(path)
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Through the system's cache, in no order.
    Buffered,
    /// Past the cache: offset, length and memory are multiples of a sector.
    Direct,
}

impl Reads {
    fn flags(self) -> u32 {
        FILE_FLAG_OVERLAPPED
            | match self {
                Self::Buffered => FILE_FLAG_RANDOM_ACCESS,
                Self::Direct => FILE_FLAG_NO_BUFFERING,
            }
    }
}

/// Opens a file that many threads read at a time. Only [`read_at`] can read it.
pub fn open_for_reads(path: &Path, reads: Reads) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(reads.flags()).open(path)
}

/// As [`open_for_reads`], the file that is open as `file`, whatever its name means by now.
pub fn reopen_for_reads(file: &File, reads: Reads) -> io::Result<File> {
    let share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    // SAFETY: the handle is open; no memory is passed.
    let handle = unsafe { ReOpenFile(file.as_raw_handle(), GENERIC_READ, share, reads.flags()) };
    if handle == INVALID_HANDLE_VALUE {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new handle that nothing else closes.
    Ok(unsafe { File::from_raw_handle(handle) })
}

/// Reads at an offset. One file opened by [`open_for_reads`] serves any number of threads at a time; others one.
pub fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let len = buf.len().min(1 << 30) as u32;
    transfer(file, offset, |handle, overlapped| {
        // SAFETY: `len` bytes at `buf` are ours, and `transfer` waits until the system has done with them.
        unsafe { ReadFile(handle, buf.as_mut_ptr(), len, null_mut(), overlapped) }
    })
}

/// Writes at an offset.
pub fn write_at(file: &File, buf: &[u8], offset: u64) -> io::Result<usize> {
    let len = buf.len().min(1 << 30) as u32;
    transfer(file, offset, |handle, overlapped| {
        // SAFETY: `len` bytes at `buf` stay, because `transfer` waits until the system has done with them.
        unsafe { WriteFile(handle, buf.as_ptr(), len, null_mut(), overlapped) }
    })
}

thread_local!(static EVENT: OnceCell<OwnedHandle> = const { OnceCell::new() });

/// Starts an operation at an offset and waits for its end. 0 bytes at the end of the file.
fn transfer(file: &File, offset: u64, start: impl FnOnce(HANDLE, *mut OVERLAPPED) -> i32) -> io::Result<usize> {
    EVENT.with(|event| {
        if event.get().is_none() {
            // SAFETY: no names, no attributes.
            let new = unsafe { CreateEventW(null(), 1, 0, null()) };
            if new.is_null() {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: a new handle that nothing else closes.
            let _ = event.set(unsafe { OwnedHandle::from_raw_handle(new) });
        }
        let handle = file.as_raw_handle();
        // SAFETY: plain numbers, for which zero is a value.
        let mut overlapped: OVERLAPPED = unsafe { zeroed() };
        overlapped.Anonymous.Anonymous.Offset = offset as u32;
        overlapped.Anonymous.Anonymous.OffsetHigh = (offset >> 32) as u32;
        overlapped.hEvent = event.get().map_or(null_mut(), AsRawHandle::as_raw_handle);
        let mut moved = 0;
        let started = checked(start(handle, &mut overlapped));
        let is_end = |error: &io::Error| error.raw_os_error() == Some(ERROR_HANDLE_EOF as i32);
        let done = match started {
            Err(error) if error.raw_os_error() != Some(ERROR_IO_PENDING as i32) => Err(error),
            // SAFETY: the operation was started with this struct, which stays until its end.
            _ => checked(unsafe { GetOverlappedResult(handle, &overlapped, &mut moved, 1) }),
        };
        match done {
            Err(error) if is_end(&error) => Ok(0),
            Err(error) => Err(error),
            Ok(()) => Ok(moved as usize),
        }
    })
}

fn checked(result: i32) -> io::Result<()> {
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

// Memory.

/// Address space, with memory that reads as zeros or without any. Freed by [`release`].
pub fn reserve(bytes: usize, has_memory: bool) -> io::Result<NonNull<u8>> {
    let (kind, access) =
        if has_memory { (MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) } else { (MEM_RESERVE, PAGE_NOACCESS) };
    // SAFETY: a new range at an address of the system's choice touches nothing of ours.
    let base = unsafe { VirtualAlloc(null(), bytes, kind, access) };
    NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)
}

/// Frees a range.
///
/// # Safety
/// `base` is from [`reserve`], and nothing uses the range any more.
pub unsafe fn release(base: NonNull<u8>) {
    // SAFETY: by the caller.
    unsafe { VirtualFree(base.as_ptr().cast(), 0, MEM_RELEASE) };
}

/// Gives pages back to the system, which still counts them as committed; their contents are lost. Returns whether it
/// succeeded.
///
/// # Safety
/// Whole pages of a range with memory from [`reserve`], which nothing uses during the call.
pub unsafe fn empty(start: *mut u8, bytes: usize) -> bool {
    // `DiscardVirtualMemory` is both calls in one, but Wine 8 lacks it.
    // SAFETY: by the caller.
    unsafe {
        let is_reset = !VirtualAlloc(start.cast(), bytes, MEM_RESET, PAGE_READWRITE).is_null();
        // Takes the pages from the working set, although it fails because they are not locked.
        VirtualUnlock(start.cast(), bytes);
        is_reset
    }
}

/// Memory that the system can provide now: free pages, as far as it may commit more.
pub fn available_memory() -> Option<u64> {
    memory_status().map(|status| status.ullAvailPhys.min(status.ullAvailPageFile))
}

fn memory_status() -> Option<MEMORYSTATUSEX> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut status: MEMORYSTATUSEX = unsafe { zeroed() };
    status.dwLength = size_of::<MEMORYSTATUSEX>() as u32;
    // SAFETY: the struct says its size.
    checked(unsafe { GlobalMemoryStatusEx(&mut status) }).ok().map(|()| status)
}

/// Memory of a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnMemory {
    /// Pages that it has in the machine's memory, those of files included.
    pub resident: u64,
    /// The most that it had.
    pub resident_peak: u64,
    /// Bytes committed to it alone, touched or not.
    pub private: u64,
    /// Pages that had to be fetched or made.
    pub faults: u64,
}

/// Memory of this process.
pub fn own_memory() -> Option<OwnMemory> {
    // SAFETY: no arguments, no memory; the handle needs no closing.
    memory(unsafe { GetCurrentProcess() })
}

/// Memory of a process.
pub fn memory_of(process: &impl AsRawHandle) -> Option<OwnMemory> {
    memory(process.as_raw_handle())
}

/// Memory of the process with this open handle.
fn memory(process: HANDLE) -> Option<OwnMemory> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut counters: PROCESS_MEMORY_COUNTERS_EX = unsafe { zeroed() };
    let bytes = size_of::<PROCESS_MEMORY_COUNTERS_EX>() as u32;
    counters.cb = bytes;
    let pointer = (&raw mut counters).cast::<PROCESS_MEMORY_COUNTERS>();
    // SAFETY: the handle is open; the struct begins as the other one, and its size is given.
    checked(unsafe { K32GetProcessMemoryInfo(process, pointer, bytes) }).ok()?;
    Some(OwnMemory {
        resident: counters.WorkingSetSize as u64,
        resident_peak: counters.PeakWorkingSetSize as u64,
        private: counters.PrivateUsage as u64,
        faults: counters.PageFaultCount.into(),
    })
}

/// Limit of this process's job object on committed memory: of the process, or of all processes of the job.
pub fn job_memory_limit() -> Option<u64> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = unsafe { zeroed() };
    let (pointer, bytes) = ((&raw mut limits).cast::<c_void>(), size_of_val(&limits) as u32);
    // SAFETY: without a handle the system takes this process's job; the struct has the size that is written.
    let asked =
        unsafe { QueryInformationJobObject(null_mut(), JobObjectExtendedLimitInformation, pointer, bytes, null_mut()) };
    checked(asked).ok()?;
    let flags = limits.BasicLimitInformation.LimitFlags;
    let limit = |flag, bytes: usize| (flags & flag != 0 && bytes > 0).then_some(bytes as u64);
    let process = limit(JOB_OBJECT_LIMIT_PROCESS_MEMORY, limits.ProcessMemoryLimit);
    process.into_iter().chain(limit(JOB_OBJECT_LIMIT_JOB_MEMORY, limits.JobMemoryLimit)).min()
}

/// The system's number of the calling thread.
pub fn thread_id() -> u32 {
    // SAFETY: no arguments, no memory.
    unsafe { GetCurrentThreadId() }
}

// Processes.

/// Processes that end when this one ends in any way, and whose memory can be limited.
#[derive(Debug)]
pub struct Job(OwnedHandle);

impl Job {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no attributes, no name.
        let job = unsafe { CreateJobObjectW(null(), null()) };
        if job.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new handle that nothing else closes.
        let job = Self(unsafe { OwnedHandle::from_raw_handle(job) });
        job.set(JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE, 0)?;
        Ok(job)
    }

    pub fn add(&self, process: &impl AsRawHandle) -> io::Result<()> {
        // SAFETY: both handles are open.
        checked(unsafe { AssignProcessToJobObject(self.0.as_raw_handle(), process.as_raw_handle()) })
    }

    /// Limits the memory that each process may commit.
    pub fn limit_memory(&self, bytes: u64) -> io::Result<()> {
        self.set(JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | JOB_OBJECT_LIMIT_PROCESS_MEMORY, bytes)
    }

    fn set(&self, flags: u32, process_bytes: u64) -> io::Result<()> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = unsafe { zeroed() };
        limits.BasicLimitInformation.LimitFlags = flags;
        limits.ProcessMemoryLimit = process_bytes as usize;
        let (pointer, bytes) = ((&raw const limits).cast::<c_void>(), size_of_val(&limits) as u32);
        let job = self.0.as_raw_handle();
        // SAFETY: the handle is open; the struct has the size that is read.
        checked(unsafe { SetInformationJobObject(job, JobObjectExtendedLimitInformation, pointer, bytes) })
    }
}

/// CPU time that a process has used.
pub fn cpu_time(process: &impl AsRawHandle) -> io::Result<Duration> {
    let zero = FILETIME { dwLowDateTime: 0, dwHighDateTime: 0 };
    let [mut began, mut ended, mut kernel, mut user] = [zero; 4];
    // SAFETY: the handle is open; the call fills in four numbers.
    checked(unsafe { GetProcessTimes(process.as_raw_handle(), &mut began, &mut ended, &mut kernel, &mut user) })?;
    let ticks = |time: FILETIME| u64::from(time.dwHighDateTime) << 32 | u64::from(time.dwLowDateTime);
    Ok(Duration::from_nanos((ticks(kernel) + ticks(user)) * 100))
}

/// Bytes that this process has read and written, and the number of handles that it has open.
pub fn own_traffic() -> Option<(u64, u64, u32)> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut counters: IO_COUNTERS = unsafe { zeroed() };
    let mut handles = 0;
    // SAFETY: the calls fill in the numbers.
    unsafe {
        checked(GetProcessIoCounters(GetCurrentProcess(), &mut counters)).ok()?;
        checked(GetProcessHandleCount(GetCurrentProcess(), &mut handles)).ok()?;
    }
    Some((counters.ReadTransferCount, counters.WriteTransferCount, handles))
}

/// Ends a process at once, if it is still there.
pub fn end_process(id: u32) {
    // SAFETY: no memory is passed; the handle is closed once.
    unsafe {
        let process = OpenProcess(PROCESS_TERMINATE, 0, id);
        if !process.is_null() {
            TerminateProcess(process, 1);
            CloseHandle(process);
        }
    }
}

/// A crash ends this process without a report of the system's: no window, and no debugger to wait for.
pub fn crash_silently() {
    // SAFETY: plain numbers.
    unsafe { SetErrorMode(SEM_NOGPFAULTERRORBOX) };
}

/// Ends this process at once: no exit handlers and no destructors run.
pub fn exit_at_once(status: i32) -> ! {
    // SAFETY: ends the process; its state is no longer needed.
    unsafe { TerminateProcess(GetCurrentProcess(), status.cast_unsigned()) };
    std::process::abort()
}

// The console.

/// A request of the console, or of the system, to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Break.
    Break,
    /// The window is closed, the user logs off, or the system shuts down.
    Close,
}

static ON_CONTROL: OnceLock<fn(Control)> = OnceLock::new();

/// Calls `handler` on a thread of the system's for each request. Once per process. After [`Control::Close`] the process
/// has some seconds.
pub fn watch_console(handler: fn(Control)) -> io::Result<()> {
    unsafe extern "system" fn on_control(kind: u32) -> i32 {
        let control = match kind {
            CTRL_C_EVENT => Control::Interrupt,
            CTRL_BREAK_EVENT => Control::Break,
            _ => Control::Close,
        };
        if let Some(handler) = ON_CONTROL.get() {
            handler(control);
        }
        if control == Control::Close {
            // The process ends when this function returns.
            std::thread::sleep(Duration::from_secs(30));
        }
        1
    }
    if ON_CONTROL.set(handler).is_err() {
        return Ok(());
    }
    // SAFETY: the handler may be called at any time.
    checked(unsafe { SetConsoleCtrlHandler(Some(on_control), 1) })
}

/// Whether standard input is a pipe or a file: neither a console nor `NUL`.
pub fn has_piped_input() -> bool {
    // SAFETY: the handle of the standard stream is not closed.
    matches!(unsafe { GetFileType(GetStdHandle(STD_INPUT_HANDLE)) }, FILE_TYPE_DISK | FILE_TYPE_PIPE)
}

/// Has the console show UTF-8 and the escape sequences of colours. Nothing if there is no console.
pub fn prepare_console() {
    // SAFETY: no memory but a number; handles of the standard streams are not closed.
    unsafe {
        SetConsoleOutputCP(CP_UTF8);
        SetConsoleCP(CP_UTF8);
        for stream in [STD_OUTPUT_HANDLE, STD_ERROR_HANDLE] {
            let (handle, mut mode) = (GetStdHandle(stream), 0);
            if GetConsoleMode(handle, &mut mode) != 0 {
                SetConsoleMode(handle, mode | ENABLE_PROCESSED_OUTPUT | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
            }
        }
    }
}

// Sockets.

/// Bytes by which a process is given a socket.
pub const SOCKET_BYTES: usize = size_of::<WSAPROTOCOL_INFOW>();

/// Description of a socket with which another process opens it.
pub fn socket_for(socket: &TcpListener, process: u32) -> io::Result<[u8; SOCKET_BYTES]> {
    let mut bytes = [0; SOCKET_BYTES];
    // SAFETY: the struct is plain numbers, and has room for what the call writes.
    let mut info: WSAPROTOCOL_INFOW = unsafe { zeroed() };
    // SAFETY: the socket is open.
    if unsafe { WSADuplicateSocketW(socket.as_raw_socket() as usize, process, &mut info) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both have this size; the struct has no padding that matters.
    unsafe { std::ptr::copy_nonoverlapping((&raw const info).cast(), bytes.as_mut_ptr(), SOCKET_BYTES) };
    Ok(bytes)
}

/// Opens a socket that another process gave us.
pub fn socket_from(bytes: &[u8; SOCKET_BYTES]) -> io::Result<TcpListener> {
    // The standard library starts the sockets' library with its first socket.
    drop(TcpListener::bind(("127.0.0.1", 0))?);
    // SAFETY: the struct is plain numbers of this size.
    let info: WSAPROTOCOL_INFOW = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
    let from_info = FROM_PROTOCOL_INFO;
    // SAFETY: the struct lives through the call.
    let socket = unsafe { WSASocketW(from_info, from_info, from_info, &info, 0, WSA_FLAG_OVERLAPPED) };
    if socket == INVALID_SOCKET {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new socket that nothing else closes.
    Ok(unsafe { TcpListener::from_raw_socket(socket as u64) })
}
