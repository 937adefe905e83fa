#if defined(__AMX_INT8__) || defined(__AMXINT8__)
int toy_amx_in_c = 1;
#endif
